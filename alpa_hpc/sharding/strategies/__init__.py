"""sharding/strategies"""
