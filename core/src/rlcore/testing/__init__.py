"""For whoever tests against the core: fakes of every role, small model directories, and the conformance kit."""
