"""Harnesses against peers and cuBLAS; each writes benchmarks/results/<machine>/<what>.json, for README's figures."""
