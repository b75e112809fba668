"""Exit with code 0 when a server answers `GET URL` within 5 seconds; uses no proxy.

    health.py http://10.0.0.5:22001/health

Standard library only, Python 3.8 or later: a node may have no curl.
Not here: the wait for all servers (servers.sh).
"""

import http.client
import sys
import urllib.request

try:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1], timeout=5)
except (OSError, http.client.HTTPException):  # also an HTTP status of 400 or more
    sys.exit(1)
