"""Training: step.py is the page to read first."""
