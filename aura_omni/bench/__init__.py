"""`aura-omni bench`: what a client of an OpenAI-compatible server waits for, measured from outside over HTTP."""
