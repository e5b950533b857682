"""Harnesses against peers and cuBLAS. Each writes benchmarks/results/<machine>/<what>.json, where README's figures come from."""
