"""Drills: receives the name of a mishap, brings it on a real service, hands on what became of it."""
