"""The monokernel as Jinja templates, shared by every target."""
