"""alpa_hpc"""
