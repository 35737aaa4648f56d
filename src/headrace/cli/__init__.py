"""The command line. main.py lists the commands; nothing here imports torch before a command runs."""
