"""Operations of a server's step beside attention: `append_kv`, `merge_states`."""
