"""SGLang's own classes of the model families the trainer knows, in the shape its registry looks
for.
"""
