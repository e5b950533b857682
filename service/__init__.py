"""The GEMM service: an HTTP front and the worker process that owns the device."""
