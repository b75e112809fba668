"""Training sets from published data: `stable-opd prepare`."""
