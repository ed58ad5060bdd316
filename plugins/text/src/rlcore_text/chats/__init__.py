"""Chats: messages, calls of tools, images, and how a conversation goes on."""
