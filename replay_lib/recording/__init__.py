"""What the recorder writes and how: this rank's part, the weights' pieces, one directory."""
