"""The Open Inference Protocol: receives requests of its clients (HTTP and gRPC), hands on products as replies.

Models are names for dtypes: gemm_fp16, gemm_bf16, gemm_fp32, gemm_fp64, and gemm, which takes all of them. The
way of a request is the one of /gemm: bytes into slots of the arena, admit, batch, kernel, reply.
"""
