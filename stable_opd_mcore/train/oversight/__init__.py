"""What watches a run: the guard, signals, the watchdog, the terminal."""
