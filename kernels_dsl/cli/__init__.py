"""The command line: doctor, compile, inspect, bench, demo. One module a command."""
