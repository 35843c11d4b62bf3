"""The module that a checkout is known by."""


class GrpoTrainer:
    """Nothing of it is called here."""
