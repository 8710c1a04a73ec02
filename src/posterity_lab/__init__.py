"""The lab: data, nets, streams, recipes, reports and the command line on top of the library."""
