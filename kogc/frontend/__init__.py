"""From model files and live modules to tensor graphs."""
