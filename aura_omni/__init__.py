"""aura-omni: the online server for AURA, a live assistant that hears, sees, decides and speaks."""

__version__ = "0.1.0"
