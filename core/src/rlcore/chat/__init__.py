"""Chats: what a template puts behind an answer, and the calls of tools in one."""
