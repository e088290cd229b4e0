"""Code that runs inside the sandbox, in a bare interpreter: it uses only the standard library."""
