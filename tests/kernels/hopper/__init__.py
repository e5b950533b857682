"""Tests of the Hopper kernels."""
