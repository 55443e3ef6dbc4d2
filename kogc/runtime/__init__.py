"""Runs artifacts on a device."""
