"""The command line: demo, doctor, compile, load, inspect, bench. One module a command."""
