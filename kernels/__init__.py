"""GEMM kernels, their selector and their proofs, usable without the service."""
