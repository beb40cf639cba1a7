"""Code that `make proto` generates from `control.proto`. Never edited by hand."""
