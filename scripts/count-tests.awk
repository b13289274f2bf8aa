# Sums up logs of test runs. Prints one line, `PASSED FAILED SKIPPED`:
#
#     awk -f scripts/count-tests.awk LOG..
#
# Reads the output of `cargo test -- --show-output`, wasm-bindgen-test-runner, `node --test --test-reporter=tap` and
# Python's unittest, and `skipped step: ..` lines of scripts/test itself.
#
# Rust's harness cannot skip a test while it runs: such a test prints a line that begins with `skipped:` and returns,
# and the harness counts it as passed. Here it counts as skipped, once, however often it prints that. A test that omits
# a part prints `left out:` and has passed.

FNR == 1 { passing = 0; name = ""; ran = "" }

# Tests' output is shown below their names, passed ones first.
/^successes:$/ { passing = 1; name = "" }
/^failures:$/ { passing = 0; name = "" }
/^---- .* stdout ----$/ { name = $0 }
passing && name != "" && /^skipped:/ { skipped++; passed--; name = "" }

/^test result: / {
    passed += $4; failed += $6; skipped += $8
    passing = 0; name = ""
}

# node:test. A test that timed out, or whose file ended first, is cancelled.
/^# pass [0-9]+$/ { passed += $3 }
/^# (fail|cancelled) [0-9]+$/ { failed += $3 }
/^# (skipped|todo) [0-9]+$/ { skipped += $3 }

# unittest: `Ran 9 tests in 0.1s`, then `OK (skipped=1)` or `FAILED (failures=1, errors=2, skipped=3)`.
/^Ran [0-9]+ tests? in / { ran = $2 }
/^(OK|FAILED)( \(.*\))?$/ && ran != "" {
    bad = number("failures") + number("errors") + number("unexpected successes")
    left = number("skipped")
    passed += ran - bad - left; failed += bad; skipped += left
    ran = ""
}

/^skipped step: / { skipped++ }

END { print passed + 0, failed + 0, skipped + 0 }

function number(what) {
    return match($0, what "=[0-9]+") ? substr($0, RSTART + length(what) + 1, RLENGTH - length(what) - 1) + 0 : 0
}
