"""HTTP routes, one file a subject: gemm, tensors, jobs, info."""
