"""Device drivers of the worker: each receives batches over the arena and hands on outcomes."""
