"""The ladder on sm_100a and sm_103a: nine steps from one tcgen05.mma to the product, in CuTe DSL primitives.

step1_tile … step9_multi_consumer   one idea each; read them in order, the docstrings say roles and barriers
pipeline                            PipelineState and the four barriers
epilogue, writeback                 from tensor memory to D: what all steps share; what Step 9 does
parts, raster                       tensor maps, descriptors, orders of tiles
tilings, variants                   the Step 9 family as the selector sees it; they import no compiler
"""
