"""A trainer under test against a reference: which recorded steps come out otherwise.

    reference   what is compared with: another trainer, or the same one at a git revision
    gradients   how two gradients of one experiment differ, beyond their norms
    compare     two results of one experiment to what changed; pure
    guarding    run the cases with both
    report      lines, Markdown, JUnit, JSON lines

See docs/guard.md.
"""
