"""Interfaces for engines."""
