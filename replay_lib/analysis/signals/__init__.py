"""What a step's data say about its spike: signals of rows and tokens, before any mitigation."""
