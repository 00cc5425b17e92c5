"""One partition's bytes on disk."""
