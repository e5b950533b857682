"""Data folders that earlier versions of the service left behind, and what is in them."""
