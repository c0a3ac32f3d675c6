"""The experiments of the SSIJ paper (Bornea and others, ICDE 2011, section VI), each with one command.

`python -m benchmarks experiment fig3` runs one, `python -m benchmarks experiments` all of them. `--device simulated`,
the default, charges reads to a disk that is only counted, so that the same command always gives the same result;
`--device real` reads the disk there is and takes the time.
"""
