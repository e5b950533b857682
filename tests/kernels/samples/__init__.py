"""Kernel modules that the tests of the build compile."""
