"""A package that SGLang's model registry imports: its own classes of the trainer's families."""
