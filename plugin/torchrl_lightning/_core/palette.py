"""The colours of all pictures and inspection pages."""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that colour-blind readers can distinguish (Okabe and Ito, 2008). Yellow is omitted, because it is too light
on white."""
DARK_PALETTE = ("#56B4E9", "#F28A45", "#33C79B", "#E3A6C8", "#F2BC48", "#A5D8F7", "#FFFFFF")
"""Lighter versions of these colours for dark pages."""
