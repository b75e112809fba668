"""The program that runs inside a server's own venv; nothing of it is imported by the trainer."""
