"""The pipeline in a process of its own, so that HTTP, JSON and media never hold up the thread that owns the device.

client   what the server has instead of the pipeline, with the same interface
worker   what runs in the other process
wire     Python objects over a socket between the two
messages what they say to each other
"""
