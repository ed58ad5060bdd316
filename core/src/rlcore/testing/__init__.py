"""What tests use: fakes of every role, small model directories, and ranks in processes of their own."""
