"""Tests of the harnesses."""
