"""What the machine gives: files, addresses, downloads, processes. Knows nothing of training."""
