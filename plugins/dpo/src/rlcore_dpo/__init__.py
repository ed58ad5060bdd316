"""Algorithm for rlcore: learning from preferences (DPO and its family)"""
