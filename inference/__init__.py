"""Everything that runs a model without training it: the decode loop, verification, roll-out, capture, evaluation, export."""
