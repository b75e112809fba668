"""The program that runs in the servers' own venv; the trainer imports nothing from here."""
