"""What runs inside the sandbox: standard library only, in a bare interpreter that has not loaded the package."""
