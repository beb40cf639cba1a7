"""The control plane's protobuf definitions and the code that `make proto` generates from them, checked in."""
