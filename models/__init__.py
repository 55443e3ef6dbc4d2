"""Reference PyTorch models, their configurations, shape presets and one small trained checkpoint."""
