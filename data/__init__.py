"""Rows and gates, converters of the published sets, pools, the toy world."""
